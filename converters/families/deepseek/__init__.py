"""DeepSeek V3 and the models that are built as it: Moonlight, Kimi."""

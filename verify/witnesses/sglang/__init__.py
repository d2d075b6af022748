"""Real SGLang as a witness: the job, the load, and what each parameter should hold."""

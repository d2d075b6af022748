"""A live SGLang engine on GPUs: the requests of trainers, and the read-back of its ranks."""

"""A live SGLang engine on GPUs: the requests that trainers send it, and what its ranks write down."""

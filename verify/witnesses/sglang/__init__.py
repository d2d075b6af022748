"""SGLang as a witness."""

"""The simulated engine and the fake vLLM and SGLang servers."""

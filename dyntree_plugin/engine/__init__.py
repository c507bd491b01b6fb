"""The glue: the only place that imports vLLM."""

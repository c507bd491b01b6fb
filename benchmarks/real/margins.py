"""What rounding may change, in all comparisons of two engines."""

MARGINS = {"bfloat16": 0.25, "float16": 0.03125, "float32": 0.01}
"""Most logits by which rounding may move two tokens against each other. In bf16 and fp16, it is
four units in the last place of a logit between 8 and 16. In fp32, rounding moves them by far
less."""

"""Training of the embedded pair."""

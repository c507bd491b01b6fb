"""The sampling parameters of the rows of a batch."""

"""Times of the kernels, beside other ways to compute the same."""

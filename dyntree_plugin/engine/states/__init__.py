"""Trees through recurrent layers of a target, which keep one state for each request."""

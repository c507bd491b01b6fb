"""What is served and what is refused, decided before any weights load."""

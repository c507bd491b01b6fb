"""The commands of the console script, a package each, and what several of them need."""

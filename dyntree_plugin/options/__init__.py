"""The options of trees, from their text to one resolved record."""

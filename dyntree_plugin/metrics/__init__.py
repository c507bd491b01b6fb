"""The plugin's metrics."""

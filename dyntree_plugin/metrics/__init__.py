"""What the plugin measures."""

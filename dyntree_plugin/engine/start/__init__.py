"""What an engine does before it serves: rehearses steps, and measures what they cost."""

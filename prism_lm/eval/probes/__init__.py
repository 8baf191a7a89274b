"""Nine mechanistic tasks on 64 tokens, the small models that are compared on them, and their trainer."""

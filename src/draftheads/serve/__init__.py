"""A server for many users at once, with OpenAI's interface."""

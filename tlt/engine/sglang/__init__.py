"""The engine over SGLang. Only a rank that is configured to use it imports SGLang."""

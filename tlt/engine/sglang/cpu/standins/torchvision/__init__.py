"""torchvision in name only: SGLang imports it for models that see, whichever model it runs."""

"""A stand-in for torchvision, which SGLang imports for vision models whichever model it runs."""

"""The models that SGLang's registry loads first; it would import two hundred others otherwise."""

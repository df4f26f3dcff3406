"""The models that SGLang's registry loads; it would import two hundred others otherwise."""

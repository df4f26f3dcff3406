"""The engine over SGLang. Only a rank that was told to use it imports SGLang, after `launch`."""

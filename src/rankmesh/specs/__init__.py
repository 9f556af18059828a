"""What a model is, without torch: specs, families, presets, placements and Hugging Face names."""

"""Token files, tokenizers, sample order and loading. It must not know models or meshes."""

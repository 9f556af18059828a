"""Files of weights: this project's own folders and Hugging Face's, read slice by slice, never
unpickled."""

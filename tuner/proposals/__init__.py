"""What a sweep tries next: samplers, and the model of an operator with its prior, kernel and peaks."""

"""Text to vectors, on the CPU and on CUDA."""

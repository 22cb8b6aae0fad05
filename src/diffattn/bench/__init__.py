"""Speed and memory of operators and models on the user's machine, correctness first."""

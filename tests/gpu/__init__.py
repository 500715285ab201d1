"""What runs on a real GPU, by hand (README.md): its results are kept beside the tests that use them."""

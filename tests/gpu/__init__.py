"""What runs on a real GPU, by hand: its results are kept beside the tests that use them."""

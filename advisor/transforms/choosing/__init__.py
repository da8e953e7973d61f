"""Which way a convolution's products are made, chosen by timing them: see transforms/conv_choice.py."""

"""3 x 3 convolution by Winograd's F(4x4, 3x3) in fp16, for bf16 tensors. `api` is the only public module."""

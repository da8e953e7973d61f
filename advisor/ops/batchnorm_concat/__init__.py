"""BatchNorm in training mode (+ activation) over a concatenation that grows by one feature map at a time (DenseNet)."""

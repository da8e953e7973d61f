"""BatchNorm in training mode, activation and max-pooling as one operation (stems): `api` is the only public module."""

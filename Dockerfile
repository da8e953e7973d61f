# advisor on a machine with an NVIDIA GPU.
#
#   docker build -t advisor .
#   docker run --rm --gpus all --cap-add SYS_ADMIN --shm-size 8g -v "$PWD:/job" advisor profile train.py
#
# torch brings its own CUDA libraries, so the host gives only the driver (through the NVIDIA Container Toolkit). The compiler and
# Python's headers make launches of the bundled kernels cheaper. SYS_ADMIN lets advisor read hardware counters: without it bytes
# are modelled. PyTorch's loader workers share memory through /dev/shm, which is 64 MB unless --shm-size says more.
# For a driver of CUDA 12: --build-arg CUDA_MAJOR=12, with a torch that is a CUDA 12 build: --build-arg TORCH="torch==2.8.*".
FROM python:3.12-slim

ARG CUDA_MAJOR=13
ARG TORCH=torch

RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

RUN pip install --no-cache-dir "${TORCH}" torchvision

COPY . /src
RUN pip install --no-cache-dir "/src[cuda${CUDA_MAJOR}]"

# Run folders and caches lie in the mounted folder and in the home of whoever runs the container.
WORKDIR /job
ENTRYPOINT ["advisor"]
CMD ["doctor"]

# A node with an engine: shards of a cluster, its head, the service, the command line. With or without a GPU.
#
#     docker build -t undertow-engine:1.0.1 .
#     docker run --gpus all undertow-engine:1.0.1 undertow doctor
#
# Dockerfile.vllm has the same Ubuntu, and so the same Python: Ray wants one version on all nodes.
ARG CUDA=13.0.3
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04

# gcc: Triton compiles a launcher for each of torch's kernels; rsync: `ray up` copies files with it
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv rsync \
    && rm -rf /var/lib/apt/lists/*

# login shells, which `ray up` uses, set PATH anew
ENV VIRTUAL_ENV=/opt/undertow PATH=/opt/undertow/bin:$PATH
RUN python3 -m venv /opt/undertow \
    && echo 'export PATH=/opt/undertow/bin:$PATH' > /etc/profile.d/undertow.sh

WORKDIR /usr/src/undertow
COPY . .
# locks/make.py says which extras are in it
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --require-hashes --requirement locks/image.txt \
    && pip install --no-deps --no-build-isolation .

# no root; Ray asks the image for HOME. It holds compiled kernels and models, /data the store: mount volumes there,
# which take the folder's owner, and /tmp, and nothing else needs to be writable
ENV HOME=/home/undertow NUMBA_CACHE_DIR=/home/undertow/.cache/numba PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 10001 --create-home undertow && install --directory --owner=undertow --group=undertow /data
USER 10001:10001
# a folder named `kernels` in the working directory would stand in the way of the package of that name
WORKDIR /home/undertow
CMD ["bash"]

# A node with an engine: shards of a cluster, its head, the service, the command line. With or without a GPU.
#
#     docker build -t undertow-engine:0.1.0 .
#     docker run --gpus all undertow-engine:0.1.0 undertow doctor
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
# faiss-gpu is the same module as faiss-cpu and must take its place. boto3: Ray starts nodes on AWS with it
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt '.[cluster,gpu,offline,serve]' 'ray[default]' boto3 \
    && pip uninstall --yes faiss-cpu \
    && pip install --constraint constraints.txt faiss-gpu

# a folder named `kernels` in the working directory would stand in the way of the package of that name
WORKDIR /root
CMD ["bash"]

"""An ordinary training loop, for benchmarks/guest.py: it prints the number of steps it has made.

    python benchmarks/guest_training.py [resnet18 | small] [captured]

`captured` makes each step one CUDA graph, as in PyTorch's documentation.
"""

import sys
import time

import torch


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "resnet18"
    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if kind == "resnet18":
        from torchvision.models import resnet18

        net, shape = resnet18(num_classes=10).to(where), (32, 3, 128, 128)
    else:
        net, shape = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10)).to(where), (4, 3, 8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(shape, device=where), torch.randint(0, 10, (shape[0],), device=where)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = captured(step) if "captured" in sys.argv and where == "cuda" else step
    steps, said = 0, time.monotonic()
    while True:
        loss = run()
        steps += 1
        if time.monotonic() - said > 0.05:
            loss.item()  # so that steps are counted when they are done
            said = time.monotonic()
            print(steps, said, flush=True)


def captured(step):  # type: ignore[no-untyped-def]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    # Without a bound a loop launches a second's worth of graphs ahead of the GPU, and its steps are counted in bursts.
    behind = [torch.cuda.Event(), torch.cuda.Event()]
    behind[1].record()

    def run() -> torch.Tensor:
        graph.replay()
        behind[1].synchronize()  # the step before this one
        behind[0].record()
        behind.reverse()
        return loss

    return run


if __name__ == "__main__":
    main()

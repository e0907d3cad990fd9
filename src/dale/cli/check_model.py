"""`dale check-model`: what robust training needs of a model."""

from __future__ import annotations

import argparse

HELP = "check whether a model of yours fits robust training"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="NAME", help="a name (`dale list models`) or package.module:Name")
    parser.add_argument("--dataset", metavar="NAME|PATH", help="take image shape and classes from this data set")
    parser.add_argument("--data-dir", metavar="DIR", help="where data files lie (default: $DALE_DATA or a user cache)")
    parser.add_argument(
        "--image-shape", metavar="N", type=int, nargs=3, default=(3, 32, 32), help="channels height width"
    )
    parser.add_argument("--classes", metavar="N", type=int, default=10, help="number of classes")
    parser.add_argument("--init", metavar="FILE", help="load these weights: a .safetensors file, or zoo:NAME")
    parser.add_argument("--device", metavar="DEVICE", default="cpu", help="cpu or cuda")


def run(args: argparse.Namespace) -> int:
    """Run the command: exit code 0 if the model fits, 1 if a check fails."""
    from dale.environment import find_device
    from dale.models import check_model, create_model

    device = find_device(args.device)
    shape, classes = tuple(args.image_shape), args.classes
    if args.dataset is not None:
        from dale.data import load_dataset

        data = load_dataset(args.dataset, data_dir=args.data_dir)
        shape, classes = data.image_shape, data.num_classes
    model = create_model(
        args.model, channels=shape[0], size=(shape[1], shape[2]), num_classes=classes, init=args.init
    ).to(device)
    report = check_model(model, shape, classes, device=device)
    print(report)
    return 0 if report.ok else 1

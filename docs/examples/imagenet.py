r"""ImageNet-style training: argparse, meters, checkpoint and resume, validation, best model kept.

DATA is a folder with train.pt and val.pt, each a tuple (images N,3,H,W float32, targets N int64). With --dummy or
--device-data the images are synthetic, and nothing is read or downloaded.

Full size on a GPU:       python imagenet.py -a resnet50 -b 256 --dummy -j 12
Several GPUs, one host:   torchrun --nproc-per-node 8 imagenet.py -a resnet50 -b 256 --dummy -j 12
On-GPU synthetic data:    python imagenet.py -a resnet50 -b 256 --device-data
The same by a loader:     python imagenet.py -a resnet50 -b 256 --resident 2048
Quick on a CPU:           python imagenet.py -a resnet18 -b 8 --image-size 64 --num-classes 10 --epochs 1 \
                              --train-size 80 --val-size 16 -j 0 --dummy
"""

import argparse
import os
import random
import shutil
import time
from enum import Enum

import models
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data
import torch.utils.data.distributed

try:
    import torchvision.models as zoo
except (ImportError, RuntimeError):  # RuntimeError: built for another torch
    zoo = None

model_names = ["mobilenet_v3_large", "resnet18", "resnet50"]
if zoo is not None:
    model_names += sorted(set(zoo.list_models(module=zoo)) - {*model_names, "googlenet", "inception_v3"})  # two losses

parser = argparse.ArgumentParser(description="PyTorch ImageNet training")
parser.add_argument("data", metavar="DATA", nargs="?", default="imagenet", help="folder with train.pt and val.pt")
parser.add_argument(
    "-a", "--arch", metavar="ARCH", default="resnet50", choices=model_names, help=", ".join(model_names)
)
parser.add_argument("-j", "--workers", default=4, type=int, metavar="N", help="data loading workers")
parser.add_argument("--epochs", default=90, type=int, metavar="N")
parser.add_argument("--start-epoch", default=0, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=256, type=int, metavar="N", help="of each process")
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, dest="lr")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("-p", "--print-freq", default=10, type=int, metavar="N")
parser.add_argument("--resume", default="", type=str, metavar="PATH", help="path to a checkpoint")
parser.add_argument("-e", "--evaluate", action="store_true", help="evaluate on the validation set and exit")
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--dummy", action="store_true", help="fake images made by the loader's workers")
parser.add_argument("--device-data", action="store_true", help="one fake batch that stays on the device")
parser.add_argument(
    "--resident",
    default=0,
    type=int,
    metavar="N",
    help="N fake images stay on the device; a loader makes batches of them there",
)
parser.add_argument("--no-tf32", action="store_true", help="convolutions in fp32's own precision")
parser.add_argument("--image-size", default=224, type=int)
parser.add_argument("--num-classes", default=1000, type=int)
parser.add_argument("--train-size", default=1281167, type=int)
parser.add_argument("--val-size", default=50000, type=int)

best_acc1 = 0.0


def main():
    global best_acc1
    args = parser.parse_args()

    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
        cudnn.deterministic = True

    if args.no_tf32:
        cudnn.allow_tf32 = False

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.distributed = "LOCAL_RANK" in os.environ  # torchrun started this process
    if args.distributed:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    args.processes = dist.get_world_size() if args.distributed else 1
    args.first = not args.distributed or dist.get_rank() == 0  # the process that prints and saves

    if args.first:
        print(f"=> creating model '{args.arch}'")
    model = getattr(models if hasattr(models, args.arch) else zoo, args.arch)(num_classes=args.num_classes)
    model = model.to(device)

    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)

    if args.resume:
        if os.path.isfile(args.resume):
            print(f"=> loading checkpoint '{args.resume}'")
            checkpoint = torch.load(args.resume, map_location=device)
            args.start_epoch = checkpoint["epoch"]
            best_acc1 = checkpoint["best_acc1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
            print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")
        else:
            print(f"=> no checkpoint found at '{args.resume}'")

    train_loader, val_loader = make_loaders(args, device)
    trained = model
    if args.distributed:
        trained = nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )

    if args.evaluate:
        validate(val_loader, model, criterion, args, device)
        return

    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed and not args.device_data:
            train_loader.sampler.set_epoch(epoch)
        train(train_loader, trained, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, args, device)
        scheduler.step()

        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.first:
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "arch": args.arch,
                    "state_dict": model.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
            )


class FakeImages(torch.utils.data.Dataset):
    """Random float images; the class is in the mean of the image, so that the loss can fall."""

    def __init__(self, size, image_size, num_classes):
        self.size = size
        self.image_size = image_size
        self.num_classes = num_classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        target = int(torch.randint(0, self.num_classes, (), generator=generator))
        img = torch.randn(3, self.image_size, self.image_size, generator=generator)
        return img + target / self.num_classes, target


class ResidentImages(torch.utils.data.Dataset):
    """Images that lie on the device, over and over; a whole batch is taken at once."""

    def __init__(self, size, args, device):
        self.size = size
        generator = torch.Generator(device=device).manual_seed(0)
        shape = (min(size, args.resident), 3, args.image_size, args.image_size)
        self.images = torch.randn(shape, generator=generator, device=device)
        self.target = torch.randint(0, args.num_classes, shape[:1], generator=generator, device=device)

    def __len__(self):
        return self.size

    def __getitems__(self, indices):
        taken = torch.tensor(indices).remainder_(len(self.images)).to(self.images.device, non_blocking=True)
        return self.images[taken], self.target[taken]

    def __getitem__(self, index):
        return self.images[index % len(self.images)], self.target[index % len(self.images)]


def as_it_is(batch):
    return batch


class DeviceBatches:
    """The same batch over and over, already on the device."""

    def __init__(self, size, args, device):
        self.length = max(1, size // args.batch_size)
        generator = torch.Generator(device=device).manual_seed(dist.get_rank() if args.distributed else 0)
        shape = (args.batch_size, 3, args.image_size, args.image_size)
        self.images = torch.randn(shape, generator=generator, device=device)
        self.target = torch.randint(0, args.num_classes, shape[:1], generator=generator, device=device)

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            yield self.images, self.target


def make_loaders(args, device):
    if args.device_data:
        return DeviceBatches(args.train_size, args, device), DeviceBatches(args.val_size, args, device)
    if args.resident:
        train_dataset, val_dataset = (ResidentImages(size, args, device) for size in (args.train_size, args.val_size))
    elif args.dummy:
        train_dataset = FakeImages(args.train_size, args.image_size, args.num_classes)
        val_dataset = FakeImages(args.val_size, args.image_size, args.num_classes)
    else:
        train_dataset = torch.utils.data.TensorDataset(*torch.load(os.path.join(args.data, "train.pt")))
        val_dataset = torch.utils.data.TensorDataset(*torch.load(os.path.join(args.data, "val.pt")))
    # A batch that was made on the device is neither collated, pinned nor handed over by another process.
    by_workers = {"num_workers": args.workers, "pin_memory": True}
    made = {"collate_fn": as_it_is} if args.resident else by_workers
    train_sampler = val_sampler = None
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False)
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=train_sampler is None,
        sampler=train_sampler,
        **made,
    )
    val_loader = torch.utils.data.DataLoader(
        val_dataset,
        batch_size=args.batch_size,
        shuffle=False,
        sampler=val_sampler,
        **made,
    )
    return train_loader, val_loader


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    batch_time = AverageMeter("Time", ":6.3f")
    data_time = AverageMeter("Data", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    top5 = AverageMeter("Acc@5", ":6.2f")
    progress = ProgressMeter(len(train_loader), [batch_time, data_time, losses, top1, top5], prefix=f"Epoch: [{epoch}]")

    model.train()

    began = end = time.time()
    for i, (images, target) in enumerate(train_loader):
        data_time.update(time.time() - end)

        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)

        output = model(images)
        loss = criterion(output, target)

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        top5.update(acc5[0], images.size(0))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        batch_time.update(time.time() - end)
        end = time.time()

        if args.first and i % args.print_freq == 0:
            progress.display(i + 1)

    if args.first:
        mean = f"{losses.avg:.4f}"  # the last step's is known, so the device is done
        rate = len(train_loader) * args.batch_size * args.processes / (time.time() - began)
        print(f"=> epoch {epoch}: loss {mean}, {rate:.1f} images/s", flush=True)


def validate(val_loader, model, criterion, args, device):
    batch_time = AverageMeter("Time", ":6.3f", Summary.NONE)
    losses = AverageMeter("Loss", ":.4e", Summary.NONE)
    top1 = AverageMeter("Acc@1", ":6.2f", Summary.AVERAGE)
    top5 = AverageMeter("Acc@5", ":6.2f", Summary.AVERAGE)
    progress = ProgressMeter(len(val_loader), [batch_time, losses, top1, top5], prefix="Test: ")

    model.eval()

    with torch.no_grad():
        end = time.time()
        for i, (images, target) in enumerate(val_loader):
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)

            output = model(images)
            loss = criterion(output, target)

            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
            top5.update(acc5[0], images.size(0))

            batch_time.update(time.time() - end)
            end = time.time()

            if args.first and i % args.print_freq == 0:
                progress.display(i + 1)

    if args.distributed:
        top1.all_reduce(device)
        top5.all_reduce(device)
    if args.first:
        progress.display_summary()
    return float(top1.avg)


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    """The latest value and the running average."""

    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name = name
        self.fmt = fmt
        self.summary_type = summary_type
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self, device):
        total = torch.tensor([float(self.sum), self.count], device=device)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def __str__(self):
        fmtstr = "{name} {val" + self.fmt + "} ({avg" + self.fmt + "})"
        return fmtstr.format(**self.__dict__)

    def summary(self):
        return "" if self.summary_type is Summary.NONE else f"{self.name} {float(self.avg):.3f}"


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        width = len(str(num_batches))
        self.batch_fmtstr = "[{:" + str(width) + "d}/" + str(num_batches) + "]"
        self.meters = meters
        self.prefix = prefix

    def display(self, batch):
        entries = [self.prefix + self.batch_fmtstr.format(batch)]
        entries += [str(meter) for meter in self.meters]
        print("\t".join(entries), flush=True)

    def display_summary(self):
        entries = [" *"]
        entries += [meter.summary() for meter in self.meters]
        print(" ".join(filter(None, entries)), flush=True)


def accuracy(output, target, topk=(1,)):
    """Share of samples, in per cent, whose class is among the k best guesses, for each k."""
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)

        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))

        res = []
        for k in topk:
            correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)
            res.append(correct_k.mul_(100.0 / batch_size))
        return res


if __name__ == "__main__":
    main()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()

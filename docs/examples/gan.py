"""DCGAN: generator and discriminator trained in turn by two optimizers, on synthetic images.

Full size on a GPU:  python gan.py
Quick on a CPU:      python gan.py --niter 1 --train-size 128 --batchSize 16 --imageSize 32 --ngf 8 --ndf 8
"""

import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=128)
parser.add_argument("--imageSize", type=int, default=64, choices=(32, 64))
parser.add_argument("--nz", type=int, default=100, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=64)
parser.add_argument("--ndf", type=int, default=64)
parser.add_argument("--niter", type=int, default=25, help="epochs")
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--train-size", type=int, default=20000)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz, ngf, image_size, nc=3):
        super().__init__()
        scale = image_size // 8
        layers = [nn.ConvTranspose2d(nz, ngf * scale, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * scale), nn.ReLU(True)]
        while scale > 1:
            layers += [
                nn.ConvTranspose2d(ngf * scale, ngf * scale // 2, 4, 2, 1, bias=False),
                nn.BatchNorm2d(ngf * scale // 2),
                nn.ReLU(True),
            ]
            scale //= 2
        layers += [nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False), nn.Tanh()]
        self.main = nn.Sequential(*layers)

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ndf, image_size, nc=3):
        super().__init__()
        layers = [nn.Conv2d(nc, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        scale = 1
        while scale < image_size // 8:
            layers += [
                nn.Conv2d(ndf * scale, ndf * scale * 2, 4, 2, 1, bias=False),
                nn.BatchNorm2d(ndf * scale * 2),
                nn.LeakyReLU(0.2, inplace=True),
            ]
            scale *= 2
        layers += [nn.Conv2d(ndf * scale, 1, 4, 1, 0, bias=False), nn.Sigmoid()]
        self.main = nn.Sequential(*layers)

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


def main():
    opt = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    patterns = torch.rand(64, 3, 4, 4) * 2 - 1
    images = nn.functional.interpolate(patterns, size=opt.imageSize, mode="bilinear")
    dataset = TensorDataset(images[torch.randint(0, 64, (opt.train_size,))])
    dataloader = DataLoader(dataset, batch_size=opt.batchSize, shuffle=True)

    netG = Generator(opt.nz, opt.ngf, opt.imageSize).to(device)
    netG.apply(weights_init)
    netD = Discriminator(opt.ndf, opt.imageSize).to(device)
    netD.apply(weights_init)

    criterion = nn.BCELoss()
    real_label = 1
    fake_label = 0

    optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

    for epoch in range(opt.niter):
        for i, data in enumerate(dataloader, 0):
            # Update D: maximize log(D(x)) + log(1 - D(G(z)))
            netD.zero_grad()
            real_cpu = data[0].to(device)
            batch_size = real_cpu.size(0)
            label = torch.full((batch_size,), real_label, dtype=real_cpu.dtype, device=device)

            output = netD(real_cpu)
            errD_real = criterion(output, label)
            errD_real.backward()
            D_x = output.mean().item()

            noise = torch.randn(batch_size, opt.nz, 1, 1, device=device)
            fake = netG(noise)
            label.fill_(fake_label)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            D_G_z1 = output.mean().item()
            errD = errD_real + errD_fake
            optimizerD.step()

            # Update G: maximize log(D(G(z)))
            netG.zero_grad()
            label.fill_(real_label)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            D_G_z2 = output.mean().item()
            optimizerG.step()

            print(
                f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} "
                f"D(x): {D_x:.4f} D(G(z)): {D_G_z1:.4f} / {D_G_z2:.4f}",
                flush=True,
            )

    torch.save(netG.state_dict(), "netG.pth")
    torch.save(netD.state_dict(), "netD.pth")


if __name__ == "__main__":
    main()

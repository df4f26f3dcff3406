from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode"]

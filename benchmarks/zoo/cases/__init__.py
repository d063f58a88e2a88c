"""The cases of each package. A module may have several packages; it is loaded only where one of them is measured."""

# Package of the index -> module here
MODULES = {
    "transformers": "hugging_face",
    "timm": "timm_models",
    "vit-pytorch": "vit_pytorch_models",
    "x-transformers": "x_transformers_models",
    "diffusers": "diffusers_models",
    "monai": "monai_models",
    "labml-nn": "labml_models",
    "open_clip_torch": "vision_and_text",
    "torchvision": "vision_and_text",
    "segment-anything": "vision_and_text",
    "kornia": "vision_and_text",
    "timesformer-pytorch": "vision_and_text",
    "axial-attention": "vision_and_text",
    "x-clip": "vision_and_text",
    "dalle2-pytorch": "vision_and_text",
    "fair-esm": "sequences",
    "enformer-pytorch": "sequences",
    "openai-whisper": "sequences",
    "local-attention": "sequences",
    "reformer-pytorch": "sequences",
    "perceiver-pytorch": "sequences",
    "tab-transformer-pytorch": "sequences",
    "neuralforecast": "sequences",
    "pytorch-forecasting": "sequences",
}

"""The architectures, as declarations.

ResNet: He et al., CVPR 2016. BERT: Devlin et al., NAACL 2019 (post-norm encoder, token-level
loss). GPT-2: Radford et al., 2019 (pre-norm decoder). 3D U-Net: Cicek et al., MICCAI 2016, with
group instead of batch normalisation, since its batches are of one or two volumes.
No dropout anywhere: losses must agree across frameworks, whose random numbers differ.
"""

from __future__ import annotations

from xmem.workloads.spec import (
    Activation,
    Attention,
    BatchNorm,
    Block,
    Concat,
    Conv,
    ConvTranspose,
    Embedding,
    GlobalAveragePool,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    MaxPool,
    Residual,
    Sequential,
)

# Keeps the variance of a normal signal through Linear and GELU: 1 / sqrt(E[gelu(x)^2]).
_GELU_GAIN = 1.53
# The last normalisation of a residual branch starts small (Goyal et al., 2017, start it at 0), so
# that fifty layers are well conditioned and half precision can be compared with float32 at all.
_RESIDUAL_GAIN = 0.1


def sequence(**layers: Layer) -> Sequential:
    """Return the layers one after the other under their keyword names."""
    return Sequential(tuple(layers.items()))


def numbered(layers: list[Layer]) -> Sequential:
    """Return the layers one after the other under the names 0, 1, ..."""
    return Sequential(tuple((str(index), layer) for index, layer in enumerate(layers)))


def mlp(*, depth: int, width: int) -> Layer:
    """A deep chain: (batch, width) -> (batch, width); each block is Linear and GELU."""
    linear = Linear(width, width, gain=_GELU_GAIN)
    block = Block(sequence(linear=linear, gelu=Activation("gelu")))
    return sequence(blocks=numbered([block] * depth), head=Linear(width, width))


def _transformer_mlp(width: int) -> Layer:
    return sequence(
        expand=Linear(width, 4 * width), gelu=Activation("gelu"), contract=Linear(4 * width, width)
    )


def gpt2(*, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> Layer:
    """Decoder: ids (batch, sequence) -> logits (batch, sequence, vocabulary)."""
    block = Block(
        sequence(
            attention=Residual(
                sequence(norm=LayerNorm(width), attend=Attention(width, heads, causal=True))
            ),
            mlp=Residual(sequence(norm=LayerNorm(width), mlp=_transformer_mlp(width))),
        )
    )
    return sequence(
        embedding=Embedding(vocabulary, positions, width),
        blocks=numbered([block] * layers),
        norm=LayerNorm(width),
        head=Linear(width, vocabulary),
    )


def bert(*, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> Layer:
    """Encoder: ids (batch, sequence) -> logits (batch, sequence, vocabulary)."""
    block = Block(
        sequence(
            attention=Residual(Attention(width, heads, causal=False)),
            attention_norm=LayerNorm(width),
            mlp=Residual(_transformer_mlp(width)),
            mlp_norm=LayerNorm(width),
        )
    )
    return sequence(
        embedding=Embedding(vocabulary, positions, width),
        norm=LayerNorm(width),
        blocks=numbered([block] * layers),
        head=Linear(width, vocabulary),
    )


def _conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, *, gain: float = 1.0
) -> Sequential:
    return sequence(
        conv=Conv(2, inputs, outputs, kernel, stride, kernel // 2, bias=False),
        norm=BatchNorm(2, outputs, gain),
    )


def _residual_block(inputs: int, outputs: int, stride: int, *, bottleneck: bool) -> Layer:
    relu = Activation("relu")
    if bottleneck:
        inner = outputs // 4
        body = sequence(
            reduce=_conv_norm(inputs, inner, 1),
            relu1=relu,
            conv=_conv_norm(inner, inner, 3, stride),
            relu2=relu,
            expand=_conv_norm(inner, outputs, 1, gain=_RESIDUAL_GAIN),
        )
    else:
        body = sequence(
            conv1=_conv_norm(inputs, outputs, 3, stride),
            relu=relu,
            conv2=_conv_norm(outputs, outputs, 3, gain=_RESIDUAL_GAIN),
        )
    same = stride == 1 and inputs == outputs
    shortcut = None if same else _conv_norm(inputs, outputs, 1, stride)
    return Block(sequence(add=Residual(body, shortcut), relu=relu))


def resnet(*, counts: tuple[int, ...], bottleneck: bool, width: int, classes: int) -> Layer:
    """Images (batch, 3, height, width) -> logits (batch, classes)."""
    blocks: list[Layer] = []
    inputs = width
    for stage, count in enumerate(counts):
        outputs = width * 2**stage * (4 if bottleneck else 1)
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(_residual_block(inputs, outputs, stride, bottleneck=bottleneck))
            inputs = outputs
    return sequence(
        stem=_conv_norm(3, width, 7, 2),
        relu=Activation("relu"),
        pool=MaxPool(2, 3, 2, 1),
        blocks=numbered(blocks),
        average=GlobalAveragePool(2),
        head=Linear(inputs, classes, gain=0.1),
    )


def _double_conv(inputs: int, outputs: int) -> Layer:
    def once(i: int) -> Layer:
        return sequence(
            conv=Conv(3, i, outputs, 3, 1, 1, bias=False),
            norm=GroupNorm(4, outputs),
            relu=Activation("relu"),
        )

    return Block(sequence(first=once(inputs), second=once(outputs)))


def unet3d(*, channels: int, levels: int, classes: int) -> Layer:
    """Volumes (batch, 1, depth, height, width) -> logits (batch, classes, same space)."""

    def level(inputs: int, depth: int) -> Layer:
        width = channels * 2**depth
        encode = _double_conv(inputs, width)
        if depth == levels - 1:
            return encode
        inner = sequence(
            down=MaxPool(3, 2, 2),
            inner=level(width, depth + 1),
            up=ConvTranspose(3, 2 * width, width, 2),
        )
        return sequence(encode=encode, skip=Concat(inner), decode=_double_conv(2 * width, width))

    return sequence(net=level(1, 0), head=Conv(3, channels, classes, 1))

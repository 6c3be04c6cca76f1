"""FlashMLA dense decode behind the contract."""

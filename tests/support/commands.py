"""What a command and a server say if memory ends, or the GPU gives up."""

MEMORY = "the memory does not suffice"
FAILED = "[METAL] Command buffer execution failed: "
REASON = "kIOGPUCommandBufferCallbackError"
SAID = {
    "[malloc] Unable to allocate 4398046511104 bytes.": MEMORY,
    "[metal::malloc] Attempting to allocate 4398046511104 bytes which is greater than the maximum "
    "allowed buffer size of 9534832640 bytes.": MEMORY,
    f"{FAILED}Insufficient Memory (00000008:{REASON}OutOfMemory)": MEMORY,
    f"{FAILED}Caused GPU Timeout Error (00000002:{REASON}Timeout)": "a pass that took too long",
    f"{FAILED}Impacting Interactivity (0000000e:{REASON}ImpactingInteractivity)": "the screen",
}
"""Message of MLX 0.32 if memory ends or the GPU gives up -> part of the line for the user."""

"""The parts of the local store: directories, new files, publishing, blobs, errors. They know descriptors and names only."""

"""Programs that measure a peer in a process of their own. They import that peer and nothing of this project but `answer`."""

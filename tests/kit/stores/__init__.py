"""Real servers of other stores than Ceph's: Google's and Azure's emulators, a second S3, two that cannot create."""

//! Files that are written whole or not at all: a reader, or a crash, finds the old contents or the new, never half.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::Path,
};

use rustix::fs::FlockOperation;
use uuid::Uuid;

/// Makes the file, or takes the place of the one there. No more than `mode` can ever be done with it, not even for a
/// moment while it is written. A symbolic link at `path` is replaced, not followed.
pub fn create(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    write(path, contents, |file| file.set_permissions(Permissions::from_mode(mode)))
}

/// Gives the file at `path` new contents; it keeps its mode, its owner and, if it is reached by a symbolic link, its
/// place. A file that may not be written stays as it is, although its folder would let it be replaced.
pub fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    let path = path.canonicalize()?;
    let old = OpenOptions::new().append(true).open(&path)?.metadata()?;
    // Root may write anything, yet a file without any write bit was meant to stay.
    if old.permissions().readonly() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    write(&path, contents, |file| {
        let new = file.metadata()?;
        if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
            fchown(file, Some(old.uid()), Some(old.gid()))?;
        }
        // After the owner, for a change of owner may take bits away.
        file.set_permissions(old.permissions())
    })
}

/// The folder of a file; a bare name stands in the working directory.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// Keeps every other process that asks for the same out of the file's folder until it is dropped. It is a courtesy: some
/// file systems have no locks, and there nothing is held.
pub fn lock_folder(path: &Path) -> Option<File> {
    let folder = File::open(folder(path)).ok()?;
    rustix::fs::flock(&folder, FlockOperation::LockExclusive).ok()?;
    Some(folder)
}

fn write(path: &Path, contents: &[u8], prepare: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    // Only a name in the same folder is sure to be on the same file system. It is random, for process ids come again.
    let temporary = folder(path).join(format!(".{}.{}", name.display(), Uuid::new_v4().simple()));
    let written = write_new(&temporary, contents, prepare).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The first error is the one to report; where nothing could be made, nothing is left.
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn write_new(path: &Path, contents: &[u8], prepare: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    prepare(&file)?;
    file.write_all(contents)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_new_file_has_its_mode_and_leaves_nothing_beside_it() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("secret");
        create(&path, b"one", 0o600).unwrap();
        create(&path, b"two", 0o600).unwrap();
        assert_eq!((fs::read(&path).unwrap(), mode(&path)), (b"two".to_vec(), 0o600));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_replaced_file_keeps_its_mode_and_its_place() {
        let folder = TempDir::new().unwrap();
        let (path, link) = (folder.path().join("real"), folder.path().join("link"));
        create(&path, b"old", 0o640).unwrap();
        symlink("real", &link).unwrap();
        replace(&link, b"new").unwrap();
        assert_eq!((fs::read(&path).unwrap(), mode(&path)), (b"new".to_vec(), 0o640));
        assert!(link.is_symlink());
    }

    #[test]
    fn a_read_only_file_stays_as_it_is() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("fixed");
        create(&path, b"old", 0o444).unwrap();
        assert_eq!(replace(&path, b"new").unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let folder = TempDir::new().unwrap();
        let taken = folder.path().join("taken");
        fs::create_dir(&taken).unwrap();
        assert!(create(&taken, b"x", 0o600).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(create(Path::new("/"), b"x", 0o600).is_err());
    }

    #[test]
    fn a_bare_name_stands_in_the_working_directory() {
        assert_eq!(folder(Path::new("proxy.toml")), Path::new("."));
        assert_eq!(folder(Path::new("a/b")), Path::new("a"));
    }
}

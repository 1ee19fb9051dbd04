//! Secrets that have a file of their own.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use super::field::Field;

/// A secret file is read whole, so something that is none must not fill the memory.
const MAX_SECRET_BYTES: u64 = 64 * 1024;

/// A secret as Docker and Kubernetes mount it: editors and `echo` leave a newline at its end.
pub(super) fn secret_of_file(field: Field<'_>) -> Option<String> {
    let path = field.path()?;
    match read_bounded(&path) {
        Ok(secret) => Some(secret.trim_end_matches(['\r', '\n']).to_owned()),
        Err(error) => {
            field.wrong(format!("can't read the secret in {}: {error}", field.shown_path().display()))
        }
    }
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_SECRET_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_SECRET_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is longer than 64 KiB"));
    }
    Ok(text)
}

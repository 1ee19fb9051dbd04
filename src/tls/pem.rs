//! Certificates and keys in PEM files.

use std::{fs, path::Path};

use rustls::pki_types::{
    CertificateDer, PrivateKeyDer,
    pem::{self, PemObject},
};

use super::{
    TlsError,
    error::{Hint, Section},
};

/// At least one certificate, in the file's order.
pub(super) fn certificates_in(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(path)?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<_, _>>()
        .map_err(|source| TlsError::Damaged { path: path.into(), source })?;
    if certificates.is_empty() {
        let hint = if holds(&text, "PRIVATE KEY-----") { Hint::Swapped } else { Hint::Nothing };
        return Err(TlsError::Absent { path: path.into(), expected: Section::Certificate, hint });
    }
    Ok(certificates)
}

/// The first private key in the file.
pub(super) fn key_in(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = read(path)?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| {
        let hint = if holds(&text, "ENCRYPTED") {
            Hint::Encrypted
        } else if holds(&text, "BEGIN CERTIFICATE-----") {
            Hint::Swapped
        } else {
            Hint::Nothing
        };
        match error {
            // The older form of an encrypted key fails on the header that says so.
            source if hint != Hint::Encrypted && !matches!(source, pem::Error::NoItemsFound) => {
                TlsError::Damaged { path: path.into(), source }
            }
            _ => TlsError::Absent { path: path.into(), expected: Section::Key, hint },
        }
    })
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read { path: path.into(), source })
}

/// Whether this stands in the text.
pub(super) fn holds(text: &[u8], line: &str) -> bool {
    text.windows(line.len()).any(|window| window == line.as_bytes())
}

/* The hooked functions: each looks at the word that suspends the container, then jumps to its wrapper, or to the driver's function, with
 * the arguments of the caller. A stub that has to wait, or does not know the driver's function yet, calls gm_hook_target(index), and jumps
 * to the address that it returns. */
#define GM_HOOK_BYTES 48 /* struct hook: its wrapper, then the driver's function */
    .text
    .set gm_index, 0
#if defined(__x86_64__)
.macro stub name, version, wrapped
    .globl \name
    .type \name, %function
\name:
    endbr64
    .if \version
    movq gm_suspend_word(%rip), %rax
    cmpl $0, (%rax)
    jne 1f
    .endif
    .if \wrapped
    jmp gm_w_\name
    .else
    movq gm_hooks + gm_index * GM_HOOK_BYTES + 8(%rip), %rax
    testq %rax, %rax
    jz 1f
    jmp *%rax
    .endif
1:  movl $gm_index, %eax
    jmp gm_ask
    .size \name, . - \name
    .set gm_index, gm_index + 1
.endm
gm_ask:
    .cfi_startproc
    .irp register, rdi, rsi, rdx, rcx, r8, r9, r10
    pushq %\register
    .cfi_adjust_cfa_offset 8
    .endr
    movl %eax, %edi
    call gm_hook_target
    .irp register, r10, r9, r8, rcx, rdx, rsi, rdi
    popq %\register
    .cfi_adjust_cfa_offset -8
    .endr
    jmp *%rax
    .cfi_endproc
#else
.macro stub name, version, wrapped
    .globl \name
    .type \name, %function
\name:
    .if \version
    adrp x16, gm_suspend_word
    ldr x16, [x16, #:lo12:gm_suspend_word]
    ldr w16, [x16]
    cbnz w16, 1f
    .endif
    .if \wrapped
    b gm_w_\name
    .else
    adrp x16, gm_hooks + gm_index * GM_HOOK_BYTES + 8
    ldr x16, [x16, #:lo12:gm_hooks + gm_index * GM_HOOK_BYTES + 8]
    cbz x16, 1f
    br x16
    .endif
1:  mov w17, gm_index
    b gm_ask
    .size \name, . - \name
    .set gm_index, gm_index + 1
.endm
gm_ask:
    .cfi_startproc
    stp x29, x30, [sp, #-80]!
    .cfi_adjust_cfa_offset 80
    .cfi_offset 29, -80
    .cfi_offset 30, -72
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    mov x29, sp
    mov w0, w17
    bl gm_hook_target
    mov x16, x0
    ldp x0, x1, [sp, #16]
    ldp x2, x3, [sp, #32]
    ldp x4, x5, [sp, #48]
    ldp x6, x7, [sp, #64]
    ldp x29, x30, [sp], #80
    .cfi_restore 29
    .cfi_restore 30
    .cfi_adjust_cfa_offset -80
    br x16
    .cfi_endproc
#endif
#define HOOK(symbol, base, version, variant) stub symbol, version, 1;
#define PASS(symbol, base, version, variant) stub symbol, version, 0;
#include "hooks.h"
    .section .note.GNU-stack, "", %progbits
